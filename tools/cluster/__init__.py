"""What a run needs of its machines: nodes, Slurm, containers, and the doctor's checks.

Gives `nodes` (which node this machine is), `slurm` and `sbatch` (what is asked, the job's script, what
the queue says), `container` (the image, and a command wrapped in it), `checks` and `doctor` (what a
machine has and lacks). It lies below `tools.launch`, which composes and executes runs.
"""
