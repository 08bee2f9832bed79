#!/bin/sh
# Generate wire/v1 from proto/: sh sdk/go/generate.sh PYTHON (one that has grpcio-tools, such as .venv/bin/python).
set -eu
case $1 in */*) python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") ;; *) python=$1 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11
GOBIN=$bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
cd "$here/../../proto"
PATH=$bin:$PATH "$python" -m grpc_tools.protoc -I . \
    --go_out="$here" --go_opt=module=pixiu --go-grpc_out="$here" --go-grpc_opt=module=pixiu \
    pixiu/wire/v1/level.proto pixiu/wire/v1/mail.proto pixiu/wire/v1/topic.proto pixiu/wire/v1/wire.proto
