"""State as plain values: parsing, attributes of objects, random generators."""
