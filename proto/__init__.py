"""Caffe's messages: the schema (caffe.proto, caffe_pb2), its text format, old formats, and files
that hold them.

`caffe_pb2.py` and `caffe_pb2.pyi` are generated, from the root of the checkout, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. caffepy/proto/caffe.proto

with the version of grpcio-tools that the dev extra pins. Only one set of messages of the package
`caffe` fits into a process: import BVLC's own caffe_pb2 elsewhere.
"""
