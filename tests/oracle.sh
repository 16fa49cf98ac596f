#!/bin/sh
# oracle.sh ORACLE BIN REFERENCE_BIN: runs the checks of the reference kit in the folder ORACLE.
#
# BIN holds m3-convert and a Python with m3_runtime, REFERENCE_BIN a Python with torch. Stops at the first check that fails.
set -eu
oracle=$1
bin=$(cd "$2" && pwd)
reference=$3
PATH=$bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for name in tiny tinyc; do
  echo "== engine against transformers: $name"
  "$bin/python" "$oracle/check_runtime.py" "$oracle/$name" "$oracle/$name.npz"
done
for name in tiny tinyc tiny-mxfp8; do
  for type in f32 bf16; do
    echo "== tensors of $name as $type"
    m3-convert "$oracle/$name" "$work/out.gguf" --type "$type"
    "$reference/python" "$oracle/verify_gguf.py" "$oracle/$name" "$work/out.gguf"
  done
done
