"""Models of Hugging Face Transformers: our parameters under their names and back, one small file for each family.

A state is their names → NumPy arrays, as `state_dict` and safetensors have them. There is no torch in this room.
"""
