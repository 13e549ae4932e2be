"""Worker processes: their start, communication, supervision and end. This layer doesn't know the work of its workers.

- `pipes`: the protocol on the pipes: one-byte signals, and messages.
- `shared_columns`: memory that the owner and its workers share.
- `serialization`: data on the way to another process, with tensors outside of the pickle.
- `remote_errors`: exceptions on the way to the owner, with the worker's traceback.
- `worker_main`: the worker's side: set-up, and the loop that serves requests.
- `worker`: one worker, seen from its owner. `worker_pool`: all workers of an owner, with deadlines.
- `ray`: the Ray runtime that this process uses.

A worker runs a `Service`. A function that travels by cloudpickle creates the service in the worker, so the user's main
module is never imported there.

The owner sends a *signal* (one byte, for frequent actions) or a *request* (a name and arguments). A worker serves one
at a time, in the order of sending. It answers a request by a value, or by the exception that was raised. A worker that
ends or misses its deadline is lost. Its owner then closes the pool or replaces the worker.
"""
