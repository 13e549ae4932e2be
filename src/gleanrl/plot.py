"""Plots of stored records on matplotlib's axes (extra ``plot``).

Each function takes a buffer or a path (see `gleanrl.data.datasets.opening.open_buffer`), and returns the axes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gleanrl import _util
from gleanrl.data.datasets.opening import open_buffer
from gleanrl.data.datasets.show import Array, first_slots, priorities_of, returns_of
from gleanrl.data.replay_buffers.describe import StoredEpisodes
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.errors import InvalidTypeError, MissingKeyError, UnsupportedError

_MOST_COLUMNS = 2_000  # of a picture of slots
_BINS = 50


def returns(data: Any, ax: Any = None, window: int = 20) -> Any:
    """Draw the return of each stored episode at the time step of its end, and the mean of the last `window` ones.

    Rewards with several values give one series each. Time steps count from the oldest stored one.

    Args:
        data: a buffer, or the path of stored records.
        ax: matplotlib's axes; None for a new figure.
        window: number of episodes of the mean, 1 or more; 1 draws none.

    Returns:
        The axes.

    Raises:
        MissingKeyError: no reward is stored, or no stored column tells where episodes end.
        InvalidTypeError: `data` is neither a buffer nor a path.
        InvalidArgumentError: `window` is below 1.
        MissingLibraryError: matplotlib isn't installed.
        Exception: an error of `open_buffer`, or of `ReplayBuffer.episodes`.
    """
    buffer = _buffer(data)
    episodes = buffer.episodes()
    series = returns_of(episodes)
    if not series and len(buffer):
        raise MissingKeyError(f"returns: expected a reward, got the keys {[*buffer.describe()]}")
    return _by_time(ax, buffer.storage, episodes, series, "return", window)


def lengths(data: Any, ax: Any = None, window: int = 20) -> Any:
    """Draw the length of each stored episode, like `returns`; the errors are the same."""
    buffer = _buffer(data)
    episodes = buffer.episodes()
    return _by_time(ax, buffer.storage, episodes, {"length": episodes.length.numpy()}, "length", window)


def _by_time(
    ax: Any, storage: Any, episodes: StoredEpisodes, series: dict[str, Array], label: str, window: int
) -> Any:
    window = _util.positive("window", window)
    step = first_slots(storage, episodes) // max(storage.rows_per_step, 1)
    end = (step - storage.oldest_step) % storage.capacity_steps + episodes.length.numpy()
    order = np.argsort(end, kind="stable")
    ax = _axes(ax)
    for name, values in series.items():
        at, values = end[order], values[order]
        (drawn,) = ax.plot(at, values, ".", alpha=0.4, label=name)
        at, values = at[np.isfinite(values)], values[np.isfinite(values)]
        if 1 < window <= len(values):
            sums = np.cumsum(np.concatenate([[0.0], values]))
            mean = (sums[window:] - sums[:-window]) / window
            ax.plot(at[window - 1 :], mean, color=drawn.get_color(), label=f"{name}, mean of {window}")
    ax.set(xlabel="time step", ylabel=label)
    if series:
        ax.legend()
    return ax


def occupancy(data: Any, ax: Any = None) -> Any:
    """Draw which slots hold records: a row for each stream, the time steps of the ring from left to right.

    Neighbouring episodes have different colours, empty slots none. A line marks the next slot to write.

    Args:
        data: a buffer, or the path of stored records.
        ax: matplotlib's axes; None for a new figure.

    Returns:
        The axes.

    Raises:
        Exception: the errors of `returns`, without those on rewards and `window`.
    """
    buffer = _buffer(data)
    storage, episodes = buffer.storage, buffer.episodes()
    streams, stored, capacity = max(storage.rows_per_step, 1), storage.num_steps, storage.capacity_steps
    steps = np.unique(np.linspace(0, capacity - 1, min(capacity, _MOST_COLUMNS)).astype(np.int64))
    colours = np.full((streams, len(steps)), np.nan)
    first = first_slots(storage, episodes)
    for stream in range(streams):
        mine = np.sort(first[first % streams == stream] // streams)
        # Steps before the first beginning continue the last episode around the end of the ring.
        number = np.searchsorted(mine, steps, "right") - 1
        colours[stream] = np.where(steps < stored, number % max(len(mine), 1) % 10, np.nan)
    ax = _axes(ax)
    ax.imshow(
        colours, aspect="auto", cmap="tab10", vmin=0, vmax=9, interpolation="nearest",
        extent=(0, capacity, streams, 0),
    )  # fmt: skip
    ax.axvline(storage.end // streams, color="black", linestyle="--")
    ax.set(
        xlabel="time step of the ring", ylabel="stream", title=f"{len(buffer)} of {capacity * streams} rows"
    )
    ax.yaxis.get_major_locator().set_params(integer=True)
    return ax


def priorities(data: Any, ax: Any = None) -> Any:
    """Draw the histogram of the stored priorities.

    Args:
        data: a buffer with a prioritized sampler, or the path of a checkpoint of one.
        ax: matplotlib's axes; None for a new figure.

    Returns:
        The axes.

    Raises:
        UnsupportedError: the buffer has no priorities.
        Exception: the errors of `returns`, without those on rewards and `window`.
    """
    buffer = _buffer(data)
    values = priorities_of(buffer)
    if values is None:
        raise UnsupportedError(
            f"priorities: expected a prioritized sampler, got {type(buffer.sampler).__name__}; use PrioritizedSampler"
        )
    ax = _axes(ax)
    ax.hist(values, bins=_BINS, log=True)
    ax.set(xlabel="priority", ylabel="rows")
    return ax


def _axes(ax: Any) -> Any:
    return _util.pyplot().subplots()[1] if ax is None else ax


def _buffer(data: Any) -> ReplayBuffer:
    if isinstance(data, (str, os.PathLike)):
        return open_buffer(data, video=False)
    if not isinstance(data, ReplayBuffer):
        raise InvalidTypeError(f"data: expected a buffer or a path, got {type(data).__name__}")
    return data
