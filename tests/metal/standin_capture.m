// SPDX-License-Identifier: Apache-2.0
// The stand-in's captures for Xcode: that one begins and ends around a queue's work.
#include "standin.h"

@interface StandinCaptureDescriptor : MTLCaptureDescriptor {
  @public
    NSURL *url;
    MTLCaptureDestination destination;
    NSObject *object;
}
@end
STANDS_FOR(MTLCaptureDescriptor, StandinCaptureDescriptor)

@implementation StandinCaptureDescriptor
- (void)setOutputURL:(NSURL *)u {
    url = [u retain];
}
- (void)setDestination:(MTLCaptureDestination)d {
    destination = d;
}
- (void)setCaptureObject:(NSObject *)o {
    object = [o retain];
}
- (void)dealloc {
    [url release];
    [object release];
    [super dealloc];
}
@end

@interface StandinCaptures : MTLCaptureManager {
  @public
    NSString *path;
}
@end
@implementation MTLCaptureManager
+ (MTLCaptureManager *)sharedCaptureManager {
    static StandinCaptures *only;
    if (!only) only = [[StandinCaptures alloc] init];
    return only;
}
@end
@implementation StandinCaptures
- (BOOL)supportsDestination:(MTLCaptureDestination)d {
    return d == MTLCaptureDestinationGPUTraceDocument && config.fail_capture != 1 && getenv("METAL_CAPTURE_ENABLED");
}
- (BOOL)startCaptureWithDescriptor:(MTLCaptureDescriptor *)d error:(NSError **)error {
    StandinCaptureDescriptor *descriptor = (StandinCaptureDescriptor *)d;
    if (config.fail_capture == 2) return failed(error, 1, "made to fail"), NO;
    if (![descriptor->object isKindOfClass:[StandinQueue class]]) complain("capture of something else than a queue");
    path = [[descriptor->url path] copy];
    note("capture starts");
    return YES;
}
- (void)stopCapture {
    if (!path) complain("stopCapture without a capture");
    fclose(fopen([path UTF8String], "w"));
    [path release];
    path = nil;
    note("capture ends");
}
@end
