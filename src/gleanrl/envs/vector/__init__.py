"""Batches of environments that step together: in this process, in threads, or in worker processes.

- `factories`: one factory for each environment, and the metadata (specs, batch size, device) of each environment.
- `independence`: the check that no two environments of a batch share a simulator.
- `members`: the environments that live in one process, and the requests to them.
- `worker`, `worker_pool`: the service of environments in a worker process, and the pool of these workers.
- `base`: `BatchedEnv`, the base class of all batches of environments.
- `serial`: `SerialEnv`, a batch in this process.
- `parallel`: `ParallelEnv`, a batch in a worker pool, and its stepper.
- `async_pool`, `async_requests`: `AsyncEnvPool`, a batch in a worker pool or in threads, and its requests.
"""
