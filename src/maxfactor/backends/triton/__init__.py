"""The equations in Triton kernels: a fixed number of launches per step.

`step` is the entrance: `make_step` plans, `FusedStep.step` launches. It uses

- `settings_rows`: what the kernels need to know of the settings;
- `local_parameters`, `plan`: which matrices and tiles there are, and who shares a launch;
- `group_tables`, `buffers`, `inputs`, `status`: what is on the device, each with its owner;
- `launches`: the launches, with their arguments;
- `orthogonal`, `products`, `workspace`, `lanes`: orthogonal directions, the memory they borrow, and
  the streams they are launched on;
- `replay`, `sharing`: CUDA graphs of the launches, and what the plans of windows share for them;
- `rounds`: the same of matrices that are cut over ranks;
- `rank_totals`, `rank_messages`, `messages`: sums and maxima over ranks, for sharded parameters;
- `kernels`: the kernels.
"""
