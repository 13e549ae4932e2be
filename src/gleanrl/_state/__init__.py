"""State as plain values: the protocol of stateful parts, the attributes of objects, and random generators."""
