"""Many environments that step as one, in this process or in processes of their own.

- `factories`: what the user passed becomes one recipe for each environment.
- `metadata`: what the environments declare, read without starting them.
- `members`: live environments side by side in one process, behind TensorDicts.
- `steppers`: the same, behind the rows of a block.
- `base`: what every batch of environments offers; `serial` and `parallel` are the two of them.
"""
