"""Classes that put this library into the trainers of others; each module needs the library that it is named after."""
