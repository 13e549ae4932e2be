"""Tensors, TensorDicts and blocks of rows: memory, schemas and conversions."""
