"""Functions that plan and run in one call, with the arguments of other libraries: block tables, xqa, cuDNN, fmha_v2."""
