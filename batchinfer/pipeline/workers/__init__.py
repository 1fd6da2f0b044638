"""Workers: the processes that run engines, and the code of the driver that starts, feeds and replaces them."""
