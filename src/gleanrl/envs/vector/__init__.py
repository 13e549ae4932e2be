"""Batches of environments that step together: in this process, in threads, or in worker processes.

- `factories`: one factory for each environment, and the metadata (specs, batch size, device) of each environment.
- `independence`: the check that no two environments of a batch share a simulator.
- `members`: a group of live environments in one process.
- `base`: `BatchedEnv`, the base class of all batches of environments.
- `serial`: `SerialEnv`, a batch in this process.
- `parallel`, `parallel_stepper`, `worker`: `ParallelEnv`, its stepper, and the service that runs in its workers.
- `async_pool`, `async_requests`, `async_threads`, `async_process`: `AsyncEnvPool`, its requests, and its two hosts.
"""
