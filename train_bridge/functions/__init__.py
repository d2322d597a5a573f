"""One autograd Function per op; forward calls the shared kernel, backward its `<op>_bwd`."""
