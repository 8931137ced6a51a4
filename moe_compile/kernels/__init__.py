"""Triton kernels, each with its torch twin in the same file.

epilogue.py  an activation expression -> a device function
sort.py      ids_TK -> routes in expert order and the tile schedule
grouped.py   the two grouped linears over that order; product.py what their kernels share with training's
hopper.py    those two for many rows an expert, with warps that fetch beside warps that multiply (Gluon): what those
             do is in hopper_parts.py, and in hopper_swapped.py where the weights are the products' tall operand
finalize.py  the weighted sum over each token's routes
sizes.py     what of them their prices need to know
launch.py    how all of them are launched: overlapped (PDL) and at little host time
tape.py      calls that are replayed by address (tensor_maps.py: by descriptor)
listed.py    experts in tensors of their own: tables of their addresses
decode.py    the same block in two launches without sorting, for few tokens
kept.py      training's first linear, which keeps what it made; backward.py the gradients at the activation and of the
             tokens, outer.py sums over each expert's routes: gradients of weights and biases
hopper_act.py, hopper_outer.py  those for Hopper, from rows in sorted order (spread.py); beside.py what warps that are
             left copy and sum meanwhile

Importing a module of this folder imports triton, sizes.py apart; providers do so only when they build a launcher.
"""
