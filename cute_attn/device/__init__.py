"""Building blocks of kernels.

``math``: arithmetic on the device and on the host; ``score_tile``: a thread's scores in a tile; ``seqlen``: sequence
lengths and starts; ``band``: the keys that a query sees; ``gemm``: mma.sync products; ``wgmma``: Hopper's products;
``pipeline``: mbarrier pipelines and named barriers; ``copy``: copies of tiles; ``convert``: conversions of fragments;
``lanes``: shuffles.
"""
