"""Runs the Hopper kernels on a CPU: their own source, over a stand-in for the CuTe DSL and a GPU in plain Python.

    source.py     the modules of kernels/hopper, with functions that may wait as generators
    dsl.py        the stand-in's modules; threads.py and launches.py: its parts; tensors.py: what it computes with
    machine.py    threads, memory, barriers, and in which order things happen
    layers.py     small layers, and the backend's own functions on the simulator

A thread is a thread, a lane a lane, and every address is the kernel's. Copies land late and in any order, warps and
lanes are slow or fast, and a run fails where a GPU would hang, where memory outside a tensor is accessed, and where
shared memory is written while wgmma or TMA reads it. test_hopper_simulator.py compares where values lie with the DSL
itself.

What only a GPU shows:
    - what the DSL and ptxas make of the source: order of instructions, registers, spills, serialised wgmmas
    - the memory order between blocks at the counter
    - lanes of a warp that poll a barrier apart from each other; here they poll together, as a GPU's do after a branch
    - swizzles other than of 128 bytes, boxes that a TMA descriptor does not take, and bank conflicts
    - approximate instructions (ex2, rcp), and sums in another order than here
    - tensors of 2^31 elements and more, experts of thousands of rows, and speed
"""
