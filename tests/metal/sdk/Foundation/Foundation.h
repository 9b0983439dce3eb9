// SPDX-License-Identifier: Apache-2.0
// The part of Apple's Foundation that the Metal shim and the generated Metal.h name, declared for compilers without
// Apple's SDK.  <objc/NSObject.h> comes with the compiler.
#pragma once
#import <objc/NSObjCRuntime.h>
#import <objc/NSObject.h>
#include <stdbool.h>
#include <stdint.h>

typedef double NSTimeInterval;
typedef double CFTimeInterval;
typedef struct _NSZone NSZone;
typedef struct _NSRange {
    NSUInteger location, length;
} NSRange;
typedef NSObject *dispatch_data_t;
typedef NSObject *dispatch_queue_t;
typedef struct __IOSurface *IOSurfaceRef;

static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
    NSRange range = {location, length};
    return range;
}

@class NSBundle, NSData, NSDate, NSDictionary, NSEnumerator, NSNumber, NSSet;

@protocol NSCopying
- (id)copyWithZone:(NSZone *)zone;
@end

@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char *)text;
- (NSString *)stringByAppendingString:(NSString *)text;
- (const char *)UTF8String;
@end

@interface NSError : NSObject <NSCopying>
- (NSString *)localizedDescription;
- (NSInteger)code;
@end

@interface NSURL : NSObject <NSCopying>
+ (NSURL *)fileURLWithPath:(NSString *)path;
@end

@interface NSArray : NSObject <NSCopying>
+ (instancetype)arrayWithObject:(id)object;
- (NSUInteger)count;
- (id)objectAtIndex:(NSUInteger)index;
@end
