"""The parts of `python -m onepass optimize`: load a model file, verify, measure, report.

- `variants.py`: the variants by name, how each is made, and its recipe for people
- `study.py`, `verify.py`: every variant against fp64 on three sets of inputs; who is right is timed, and
  verified again. The backend may have Inductor's errors besides eager's; `fuse` may not
- `measure.py`: interleaved rounds. Where repeats spread by more than 30% all are measured again
- `blocks.py`: blocks of `fuse` with predicted and measured time, chains of the backend, coverage. A variant in
  which nothing was fused is idle: its time is PyTorch's, and noise makes it no win
- `text.py`: numbers and sentences, the same on the terminal and in the report
- `console.py`, `page.py`, `headline.py`: the output. Green is for wins alone: onepass at least 2% faster than
  PyTorch's best
"""
