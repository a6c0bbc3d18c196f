"""Runs on several machines: how their launchers find each other, and what Slurm is asked for.

Gives `nodes` (which node this machine is), `rendezvous` (one run on all of them), `slurm` and `sbatch`
(what is asked, the job's script, what the queue says). It lies below what composes and executes runs:
it imports `checkpoint` and `supervise` of this package, and not the reverse.
"""
