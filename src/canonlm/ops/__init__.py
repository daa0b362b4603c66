"""The maths, without modules: each file holds one operation, from its definition to its fastest form."""
