"""One op per file: the public function with its contract, the torch reference below it. Ops import their kernels,
and both import :mod:`foresay.verifier.ops.records`."""
