"""Import hook, facade modules and reports that replace TorchRL's data layer in a program; see `gleanrl.takeover`."""
