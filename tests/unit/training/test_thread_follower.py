import threading

import torch

from polyrhythm.training.threads import ThreadFollower
from tests.conftest import build_tiny_model


def test_a_new_number_of_threads_is_applied_between_layers_forward_and_backward():
    model = build_tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    answers, asked = [2, 1, 0], []
    released = [threading.Event() for _ in answers]

    def ask(known: int) -> int:
        asked.append(known)
        index = len(asked) - 1
        released[index].wait(10)
        return answers[index]

    def change_to(index: int, follower: ThreadFollower, expected: int) -> None:
        released[index].set()
        while follower._wanted != expected:
            pass

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        follower = ThreadFollower(ask)
        follower.follow(model, optimizer)
        change_to(0, follower, 2)
        loss = model(torch.tensor([[1, 2, 3]])).logits.sum()
        assert torch.get_num_threads() == 2
        change_to(1, follower, 1)
        loss.backward()
        assert torch.get_num_threads() == 1
    finally:
        released[2].set()
        torch.set_num_threads(before)
