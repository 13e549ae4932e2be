"""`from_minari` reads all three storages of Minari, in the order of the episodes' numbers, and refuses uneven ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data import from_minari
from gleanrl.data.datasets import MinariExperienceReplay
from gleanrl.errors import DatasetError, InvalidArgumentError, UnsupportedError

h5py = pytest.importorskip("h5py")
LENGTHS = (3, 1, 4, 2, 3, 3, 1, 2, 5, 2, 3, 4)
BOX = {
    "type": "Box",
    "dtype": "float32",
    "shape": [2],
    "low": [float("-inf")] * 2,
    "high": [float("inf")] * 2,
}
DISCRETE = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 99}


def episode(number: int, steps: int) -> dict[str, Any]:
    """Return the arrays of an episode; observations and infos have one row more than the others."""
    row = np.arange(steps + 1)
    last = row[:-1] == steps - 1
    return {
        "observations": np.stack([100 * number + row, row], 1).astype(np.float32),
        "actions": row[:-1],
        "rewards": row[:-1] + 0.1,
        "terminations": last & (number % 2 == 0),
        "truncations": last & (number % 2 == 1),
        "infos/x": 100.0 * number + row,
        "infos/n/y": row[1:],
    }


def metadata(folder: Path, **changed: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "total_episodes": len(LENGTHS),
        "total_steps": sum(LENGTHS),
        "data_format": "hdf5",
        "observation_space": json.dumps(BOX),
        "action_space": json.dumps(DISCRETE),
        "dataset_id": "made/hand-v0",
        "minari_version": "0.5.3",
    }
    (folder / "metadata.json").write_text(json.dumps({**found, **changed}))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    metadata(tmp_path / "made/hand-v0/data")
    with h5py.File(tmp_path / "made/hand-v0/data/main_data.hdf5", "w") as file:
        for number, steps in enumerate(LENGTHS):
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, total_steps=steps, seed=np.uint64(2**64 - 1))
            for name, array in episode(number, steps).items():
                group[name] = array
    return tmp_path


def edited(root: Path) -> Any:
    return h5py.File(root / "made/hand-v0/data/main_data.hdf5", "a")


def expected(*names: str, shift: int = 0) -> np.ndarray:
    found = [episode(number, steps)["/".join(names)] for number, steps in enumerate(LENGTHS)]
    return np.concatenate(
        [
            rows if len(rows) == steps else rows[shift : steps + shift]
            for rows, steps in zip(found, LENGTHS, strict=True)
        ]
    )


def test_episodes_come_in_the_order_of_their_numbers_with_all_rows(root: Path):
    buffer = from_minari("made/hand-v0", batch_size=4)
    steps = buffer[:]
    assert np.array_equal(steps["observation"], expected("observations"))
    assert np.array_equal(steps["next", "observation"], expected("observations", shift=1))
    assert np.array_equal(steps["action"], expected("actions"))
    assert np.array_equal(steps["next", "reward"][:, 0], expected("rewards").astype(np.float32))
    assert np.array_equal(steps["next", "terminated"][:, 0], expected("terminations"))
    assert np.array_equal(steps["next", "truncated"][:, 0], expected("truncations"))
    assert np.array_equal(steps["info", "x"], expected("infos", "x"))
    assert np.array_equal(steps["next", "info", "x"], expected("infos", "x", shift=1))
    assert np.array_equal(steps["next", "info", "n", "y"], expected("infos", "n", "y"))
    assert ("info", "n", "y") not in steps.keys(True)
    assert steps["collector", "traj_ids"].tolist() == np.repeat(-2 - np.arange(12), LENGTHS).tolist()
    assert buffer.verify().ok and buffer.episodes().complete.all()
    assert buffer.sample().shape == (4,)


def test_class_has_the_keys_of_torchrl_and_the_rewards_of_the_file(root: Path):
    buffer = MinariExperienceReplay("made/hand-v0", batch_size=4, load_from_local_minari=True)
    assert buffer[:]["episode"].tolist() == np.repeat(np.arange(12), LENGTHS).tolist()
    assert buffer[:]["next", "reward"].dtype == torch.float64 and "collector" not in buffer.sample().keys()
    with pytest.raises(UnsupportedError, match="split_trajs"):
        MinariExperienceReplay("made/hand-v0", batch_size=4, split_trajs=True)
    with pytest.raises(UnsupportedError, match="download='force'"):
        MinariExperienceReplay("made/hand-v0", batch_size=4, download="force")


def test_chosen_episodes_and_no_infos(root: Path):
    steps = from_minari("made/hand-v0", episodes=[10, 2], infos=False)[:]
    assert steps["collector", "traj_ids"].tolist() == [-12] * 3 + [-4] * 4
    assert "info" not in steps.keys() and len(from_minari(root / "made/hand-v0")) == sum(LENGTHS)
    with pytest.raises(DatasetError, match=r"episodes.*\[12\]"):
        from_minari("made/hand-v0", episodes=[12])


def remove_episode(file: Any) -> None:
    del file["episode_7"]


def shorten(file: Any) -> None:
    del file["episode_10/rewards"]
    file["episode_10/rewards"] = np.zeros(2)


def old_antmaze(file: Any) -> None:
    observations = file["episode_10/observations"][:-1]
    del file["episode_10/observations"]
    file["episode_10/observations"] = observations


def other_info(file: Any) -> None:
    file["episode_10/infos/z"] = np.zeros(4)


def other_dtype(file: Any) -> None:
    del file["episode_10/actions"]
    file["episode_10/actions"] = np.zeros(3, np.float32)


def no_flags(file: Any) -> None:
    del file["episode_0/terminations"]


def early_end(file: Any) -> None:
    file["episode_10/terminations"][1] = True


def link(file: Any) -> None:
    del file["episode_10/observations"]
    file["episode_10/observations"] = h5py.ExternalLink("other.hdf5", "/x")


def wrong_count(file: Any) -> None:
    file["episode_10"].attrs["total_steps"] = 2**40


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (remove_episode, r"expected the episodes 0 to 12.*without \[7\]"),
        (shorten, r"episode_10/rewards: expected 3 rows for 3 steps, got 2"),
        (old_antmaze, r"episode_10/observations: expected 4 rows for 3 steps, got 3"),
        (other_info, r"episode 10: .*others: \['infos/z'\]; pass infos=False"),
        (other_dtype, r"episode_10/actions: expected rows \(\) torch.int64.*got \(\) torch.float32"),
        (no_flags, r"episode 0: expected \['terminations'\]"),
        (early_end, r"episode 10: expected flags only in the last row of an episode, got one in row 1"),
        (link, r"episode_10.*'observations'.*link"),
        (wrong_count, r"expected episodes.*1099511627806 steps"),
    ],
)
def test_uneven_data_sets_are_refused(root: Path, edit: Any, message: str):
    with edited(root) as file:
        edit(file)
    with pytest.raises(DatasetError, match=message):
        from_minari("made/hand-v0")


def test_bad_ids_and_metadata_are_refused(root: Path):
    for name in ("hand", "made/hand", "../made/hand-v0", "made//hand-v0", 3):
        with pytest.raises(InvalidArgumentError, match="dataset: expected an id"):
            from_minari(name)
    with pytest.raises(DatasetError, match="minari download made/other-v0"):
        from_minari("made/other-v0")
    (root / "made/hand-v0/data/metadata.json").write_text("{")
    with pytest.raises(DatasetError, match=r"metadata\.json: expected JSON"):
        from_minari("made/hand-v0")
    metadata(root / "made/hand-v0/data", data_format="csv")
    with pytest.raises(DatasetError, match="data_format hdf5 or arrow or parquet, got 'csv'"):
        from_minari("made/hand-v0")
    metadata(root / "made/hand-v0/data", data_format=["csv"])
    with pytest.raises(DatasetError, match="data_format hdf5 or arrow or parquet"):
        from_minari("made/hand-v0")
    metadata(root / "made/hand-v0/data", total_episodes=10**18)
    with pytest.raises(DatasetError, match=r"expected the episodes 0 to 10+ .*got 12"):
        from_minari("made/hand-v0")
    metadata(root / "made/hand-v0/data", total_episodes=0)
    with pytest.raises(DatasetError, match="expected the episodes 0 to 0"):
        from_minari("made/hand-v0")


def test_nested_spaces_texts_and_pictures_are_read(root: Path):
    image = pytest.importorskip("PIL.Image")
    import io  # noqa: PLC0415

    pixels = np.arange(4, dtype=np.uint8)[:, None, None, None] * 50 + np.zeros((4, 32, 40, 3), np.uint8)
    encoded = []
    for picture in pixels:
        stream = io.BytesIO()
        image.fromarray(picture).save(stream, "PNG")
        encoded.append(np.frombuffer(stream.getvalue(), np.uint8))
    space = {
        "type": "Dict",
        "subspaces": {
            "p": {"type": "Box", "dtype": "uint8", "shape": [32, 40, 3]},
            "u": {"type": "Tuple", "subspaces": [BOX, DISCRETE]},
            "t": {"type": "Text"},
        },
    }
    metadata(root / "made/odd-v0/data", total_episodes=1, observation_space=json.dumps(space))
    with h5py.File(root / "made/odd-v0/data/main_data.hdf5", "w") as file:
        group = file.create_group("episode_0")
        for name, array in episode(0, 3).items():
            if name != "observations":
                group[name] = array
        cells = group.create_dataset("observations/p", (4,), h5py.vlen_dtype(np.uint8))
        for row, data in enumerate(encoded):
            cells[row] = data
        group["observations/u/_index_0"] = np.zeros((4, 2), np.float32)
        group["observations/u/_index_1"] = np.arange(4)
        group.create_dataset("observations/t", data=["a", "b", "c", "d"], dtype=h5py.string_dtype())
    steps = from_minari("made/odd-v0")[:]
    assert np.array_equal(steps["observation", "p"], pixels[:-1])
    assert np.array_equal(steps["next", "observation", "p"], pixels[1:])
    assert steps["next", "observation", "u", "1"].tolist() == [1, 2, 3]
    assert steps["next", "observation", "t"] == ["b", "c", "d"]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_arrow_and_parquet_storages_give_the_records_of_hdf5(root: Path, kind: str):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = root / "made/table-v0/data"
    metadata(folder, data_format=kind)
    for number, steps in enumerate(LENGTHS):
        (folder / f"{number}").mkdir()
        (folder / f"{number}/metadata.json").write_text(json.dumps({"id": number, "total_steps": steps}))
        columns = {}
        for name, array in episode(number, steps).items():
            rows = np.concatenate([array, array[:1] * 0]) if len(array) == steps else array
            flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
            columns[name] = flat if rows.ndim == 1 else arrow.FixedSizeListArray.from_arrays(flat, 2)
        del columns["infos/n/y"]
        columns["infos"] = arrow.StructArray.from_arrays([columns.pop("infos/x")], ["x"])
        table = arrow.table(columns)
        if kind == "parquet":
            parquet.write_table(table, folder / f"{number}/part-0.parquet")
        else:
            with arrow.ipc.new_file(folder / f"{number}/part-0.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    model = from_minari("made/hand-v0")[:].exclude(("next", "info", "n"))
    assert (from_minari("made/table-v0")[:] == model).all()
    (folder / "10" / f"part-0.{kind}").write_bytes(b"ARROW1 and no more")
    with pytest.raises(DatasetError, match=rf"10/part-0\.{kind}"):
        from_minari("made/table-v0")


def test_data_sets_of_the_minari_package_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    minari = pytest.importorskip("minari")
    buffers = pytest.importorskip("minari.data_collector")
    spaces = pytest.importorskip("gymnasium.spaces")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    made = [
        buffers.EpisodeBuffer(
            id=number,
            observations=found["observations"],
            actions=found["actions"],
            rewards=found["rewards"],
            terminations=found["terminations"],
            truncations=found["truncations"],
        )
        for number, found in ((number, episode(number, steps)) for number, steps in enumerate(LENGTHS))
    ]
    with pytest.MonkeyPatch.context() as quiet:
        quiet.setattr("warnings.warn", lambda *_, **__: None)
        dataset = minari.create_dataset_from_buffers(
            "made/real-v0",
            made,
            observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float32),
            action_space=spaces.Discrete(99),
        )
    steps = from_minari("made/real-v0")[:]
    assert np.array_equal(steps["next", "observation"], expected("observations", shift=1))
    assert len(from_minari(dataset)) == sum(LENGTHS) == len(os.fspath(tmp_path)) * 0 + len(steps)
