"""What compiled programs don't look into."""

from __future__ import annotations

import torch

from gleanrl.compiling import outside_graphs


def test_compiled_programs_leave_their_graph_for_a_call():
    addresses = []

    class Notes:
        @outside_graphs
        def note(self, tensor: torch.Tensor) -> torch.Tensor:
            assert not torch.compiler.is_compiling()
            addresses.append(tensor.data_ptr())
            return tensor + 1

    notes = Notes()

    @torch.compile(backend="eager")
    def program(tensor: torch.Tensor) -> torch.Tensor:
        return notes.note(tensor) * 2

    tensor = torch.arange(3)
    assert program(tensor).tolist() == program(tensor).tolist() == [2, 4, 6]
    assert addresses == [tensor.data_ptr()] * 2
