"""`python -m gleanrl show` describes folders in LeRobot's layout. Videos are named, and not decoded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gleanrl import plot
from gleanrl.__main__ import main
from gleanrl.data.datasets.opening import export
from gleanrl.errors import DatasetError, UnsupportedError
from tests.lerobots import CAMERA, feature, second, third, with_camera

pytestmark = pytest.mark.filterwarnings("ignore:.*terminated steps have no next observation")


@pytest.mark.parametrize("layout", [second, third])
@pytest.mark.parametrize("camera", [False, True])
def test_summary_and_page_of_both_versions(tmp_path: Path, capsys: Any, layout: Any, camera: bool):
    root, page = layout(tmp_path / "set"), tmp_path / "page.html"
    if camera:  # the videos don't exist, so any attempt to decode them fails
        with_camera(root, feature("video", 16, 24, 3))
    main(["show", str(root), "--summary", "--html", str(page)])
    printed = capsys.readouterr().out
    assert "8 transitions in 2 episodes" in printed and "observation.state  float32   (2,)" in printed
    assert (f"videos, not decoded: {CAMERA} (16, 24, 3)\n" in printed) == camera
    data = json.loads(re.search(r"<script[^>]*json[^>]*>(.*?)</script>", page.read_text(), re.DOTALL)[1])
    assert data["episodes"]["length"] == [3, 5]
    assert (["(video, not decoded)", CAMERA] in data["facts"]) == camera


def test_plots_need_no_videos(tmp_path: Path):
    pytest.importorskip("matplotlib")
    root = third(tmp_path / "set")
    with_camera(root, feature("video", 16, 24, 3))
    assert plot.lengths(root).has_data()


def test_an_export_needs_the_videos(tmp_path: Path):
    root = third(tmp_path / "set")
    with_camera(root, feature("video", 16, 24, 3))
    with pytest.raises((DatasetError, UnsupportedError), match="images.top"):
        export(str(root), "safetensors", str(tmp_path / "out"))
