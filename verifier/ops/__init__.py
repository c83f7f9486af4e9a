"""One op per file: the public function with its contract, the torch reference below it."""
