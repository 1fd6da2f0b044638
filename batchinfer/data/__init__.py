"""Everything that touches storage: what is read, what is kept between runs, what is published."""
