# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's endpoints in front of an engine."""
