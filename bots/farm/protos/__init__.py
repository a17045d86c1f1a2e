"""The messages of the Remote Execution API v2 and of ByteStream: generated code, which may import protobuf alone.

Read first: remote_execution.proto.
"""
