"""How TorchRL's data layer is replaced under a program that isn't changed; see `gleanrl.takeover`."""
