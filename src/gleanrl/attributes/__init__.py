"""What an object lives by, as plain values: numbers, text, arrays, generators and containers, attribute by attribute.

`writing.saved` walks from an object through its attributes to everything that they reach. `reading.parse` reads such a
state for an object that was made in the same way. Only data are ever made anew; objects stay those that there are and
get attributes; classes and functions are compared by name, never looked up. So nothing that is read is executed, except
that an object which defines ``get_state()`` and ``set_state(state)`` gets what it gave.

Nothing is left out: a value that isn't data, whose changes nobody could see (a simulator in C, an iterator, a file), is
refused by name. What a function has closed over isn't seen.
"""
