"""PTX without the GPU that it is for: what nvcc makes of a unit, an interpreter of it, and GPUs that are made believe.

artifacts.py compiles to PTX; program.py parses it; memory.py, threads.py, instructions.py, transfers.py and warps.py
execute it; simulated.py runs Quire on that; impersonated.py loads PTX for one GPU on another.
"""
