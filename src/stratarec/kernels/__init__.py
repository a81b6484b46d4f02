"""Kernels: an operation each, with a public function, compiled forms and a plain reference."""

from stratarec.kernels.runtime.kernel_cache import choose_cache

choose_cache()
