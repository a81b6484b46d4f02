"""Records of rows outside level 0: their layout (`layout`), their codecs (`kinds`), and their
kernels.
"""
