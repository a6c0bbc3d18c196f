"""Why a training hangs: which rank stopped, who waits for it, where in the step (`make why-hang`).

`gather.py` finds what ranks left (`dumps.py` and `texts.py` read it) and makes
an `Evidence` of it (`evidence.py`). `waits.py` says who waits for whom, `order.py` who left the usual
order of calls, `verdict.py` joins both, `place.py` puts a call into the training step. No torch.
"""
