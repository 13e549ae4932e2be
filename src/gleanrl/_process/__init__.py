"""Worker processes: started, talked to, watched and ended. This layer knows nothing of what they work on.

- `channel`: what crosses the pipes: one-byte signals, and messages.
- `segment`: memory that the owner and its workers share.
- `reports`: exceptions that cross to the owner, with the worker's traceback.
- `main`: the worker's side: set-up and the loop that serves.
- `handle`: one worker, seen from its owner; `crew`: all of them, waited for together, with deadlines.

A worker runs a `Servant`, made there by a function that travels by cloudpickle; the user's main module is never
imported. The owner sends a *signal* (one byte, for what is done often) or a *request* (a name and arguments), and
waits for the answers; a worker does one thing at a time, in the order of asking. A request is answered by a value or by
the exception that it raised. When a worker ends or doesn't answer in time, its crew is of no further use: it's closed.
"""
