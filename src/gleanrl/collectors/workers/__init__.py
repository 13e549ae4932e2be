"""Collections in worker processes: batches that several of them make for one collector.

- `words`: what the owner and a worker tell each other in shared memory: grants, shares, counters.
- `servant`: the worker's side: a `Collection` that fills blocks of the shared memory.
- `weights`: the policy's weights, on their way to the workers.
- `assembling`: shares side by side, or one after the other.
- `team`: what the workers are made of; `restarts`: what becomes of those that are lost.
- `standing`: where they stand, one value: what is delivered, discarded, unwanted and lost.
- `dispatcher`: the owner's dealings with its workers: grants, shares, losses, requests.
- `crew_source`: workers as a source of batches; `synchronous`, `asynchronous`: the two kinds.

A *grant* is leave to collect one *share*, into one of the worker's blocks; shares are served in the order of the
grants. The truth about both stands in the shared words, so that no interrupt and no lost message can disturb it;
what crosses the pipes only wakes up the other side.
"""
