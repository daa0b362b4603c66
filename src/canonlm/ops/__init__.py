"""Operations on tensors, without modules: each file holds one, from its definition to its fastest form."""
