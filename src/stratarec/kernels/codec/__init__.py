"""Records of rows outside level 0: layout (`layout`), codecs (`kinds`) and kernels."""
