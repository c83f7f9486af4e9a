"""What speculation did: counted, checked again, or weighed against other ways."""
