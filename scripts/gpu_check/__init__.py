"""`scripts/gpu_check.sh`: tests, speed, MFU and a piece of a claim on a GPU, within a time limit.

`__main__` knows only the standard library, so that it starts on a bare machine and outlives what it starts. Whatever
needs torch runs as a child, tells what it found as it goes (`events`), and is ended when its time is up (`children`).
"""
