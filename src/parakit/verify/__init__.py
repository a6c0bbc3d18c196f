"""Compares the tensors of one iteration of two runs of a model, and names the first that is wrong.

Takes two captures (`parakit.artifacts.capture`: what every rank of a run wrote), a reference's and another
strategy's. `align` says which part of the reference's tensor a rank's tensor is, `compare` measures
errors against a `tolerance` that the reference measured itself, `kinds` and `parts` say what kind of
error it is, `locate` where, `verdict` puts it together and `page` draws it. Knows no launch and no
torch; `parakit.experiments` makes the captures, and `parakit.reporting` shows the verdict.
"""
