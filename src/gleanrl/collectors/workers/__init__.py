"""Collection in worker processes: each worker fills blocks in shared memory for one collector.

- `arguments`: the collectors' keywords, as one value for each worker.
- `shared_counters`: grants, shares and counters in shared memory, between the owner and each worker.
- `worker`: the worker's side: `CollectorWorker`, which fills blocks.
- `weights`: the policy's weights in shared memory, which the workers copy.
- `batching`: the workers' shares put together as one batch.
- `progress`: the counts and losses of all workers as one immutable value, and the rules for replacing lost workers.
- `controller`: the owner's side: `WorkerController`, which grants shares, takes them, and replaces lost workers.
- `source`: `WorkerSource`, the common base of the sources `synchronous` and `asynchronous`.

A *grant* permits a worker to collect one *share*, a number of steps, into one of the worker's blocks. Workers serve
grants in order. Both are recorded in shared memory only, so that no interrupt and no lost message can falsify them. A
byte through a pipe wakes up the other process.
"""
