"""Data sets of images: what a sample is, what is drawn anew, what is held out, and what is refused."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from launcher.data import Digits, ImageFolder, image_folder
from launcher.data.digits import shifted
from launcher.data.image_folder import middle_box, random_box
from launcher.errors import DataError
from launcher.tasks import Classification
from launcher.train.reading import Samples

PLAIN = {"mean": [0, 0, 0], "std": [1, 1, 1]}


def picture(file, color=(255, 0, 0), size=(10, 8)):
    pillow = pytest.importorskip("PIL.Image")
    file.parent.mkdir(parents=True, exist_ok=True)
    pillow.new("RGB", size, color).save(file)
    return file


@pytest.fixture
def folder(tmp_path):
    """Two classes with three pictures each, and what doesn't count."""
    for name, color in (("cat", (255, 0, 0)), ("ant", (0, 0, 255))):
        for number in (2, 1):
            picture(tmp_path / name / f"{number}.png", color)
        picture(tmp_path / name / "3.JPEG", color, size=(8, 12))
    picture(tmp_path / ".hidden" / "1.png")
    picture(tmp_path / "cat" / ".1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "list.txt").write_text("no class")
    return tmp_path


class TestDigits:
    def test_images_and_labels(self):
        data = Digits(split=None)
        assert len(data) == 1797
        image, label = data[0]
        assert (image.shape, image.dtype, type(label)) == ((1, 8, 8), np.float32, int)
        batch = Classification(10).collate([data[index] for index in range(len(data))])
        assert batch["x"].shape == (1797, 1, 8, 8)
        assert (float(batch["x"].min()), float(batch["x"].max())) == (0.0, 1.0)
        assert sorted(set(batch["y"].tolist())) == list(range(10))

    def test_parts_are_apart_and_stay(self):
        train, validation = Digits("train"), Digits("validation")
        assert (len(train), len(validation)) == (1617, 180)
        everything = sorted(
            image.tobytes() + bytes([label]) for image, label in map(Digits(None).__getitem__, range(1797))
        )
        parts = [part[index] for part in (train, validation) for index in range(len(part))]
        assert sorted(image.tobytes() + bytes([label]) for image, label in parts) == everything
        assert np.array_equal(Digits("validation")[7][0], validation[7][0])
        assert len({validation[index][1] for index in range(180)}) == 10

    def test_a_shift_follows_seed_epoch_and_index(self):
        data = Digits(shift=2)
        draws = [Samples(data, 1).read(epoch, 5)[0] for epoch in (0, 0, *range(1, 9))]
        assert np.array_equal(draws[0], draws[1])
        assert len({draw.tobytes() for draw in draws}) > 4
        still = Digits()[5][0]
        for draw in draws:
            moves = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
            assert any(np.array_equal(draw, shifted(still, *move)) for move in moves)
        assert np.array_equal(Digits()[5][0], still)

    def test_pixels_that_leave_do_not_come_back(self):
        image = np.arange(1, 10, dtype=np.float32).reshape(1, 3, 3)
        assert shifted(image, 1, 0).tolist() == [[[0, 0, 0], [1, 2, 3], [4, 5, 6]]]
        assert shifted(image, -1, 2).tolist() == [[[0, 0, 4], [0, 0, 7], [0, 0, 0]]]
        assert shifted(image, 0, 0).tolist() == image.tolist()

    def test_a_missing_package_is_said_with_its_remedy(self, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(DataError, match=r"sklearn isn't installed: pip install 'launcher\[images\]'"):
            Digits()
        with pytest.raises(DataError, match=r"PIL isn't installed: pip install 'launcher\[images\]'"):
            ImageFolder("anywhere")

    @pytest.mark.parametrize(
        "arguments", [{"shift": 8}, {"shift": -1}, {"shift": 1.5}, {"split": "test"}, {"holdout": 1}]
    )
    def test_arguments_that_cannot_work(self, arguments):
        with pytest.raises(DataError, match=next(iter(arguments))):
            Digits(**arguments)


class TestImageFolder:
    def test_classes_and_files_in_order(self, folder):
        data = ImageFolder(str(folder), size=4, **PLAIN)
        assert data.classes == ["ant", "cat"]
        assert [name for name, _ in data._files] == [
            f"{one}/{n}" for one in ("ant", "cat") for n in ("1.png", "2.png", "3.JPEG")
        ]
        assert [data[index][1] for index in range(6)] == [0, 0, 0, 1, 1, 1]
        image, _ = data[3]
        assert (image.shape, image.dtype) == ((3, 4, 4), np.float32)
        assert image[:, 0, 0].tolist() == [1, 0, 0]
        assert data[5][0][:, 0, 0] == pytest.approx([1, 0, 0], abs=0.02)  # JPEG keeps colours nearly
        assert Classification(2).collate([data[index] for index in range(6)])["x"].shape == (6, 3, 4, 4)

    def test_the_middle_scaled(self, tmp_path):
        pillow = pytest.importorskip("PIL.Image")
        pixels = np.zeros((8, 16, 3), dtype=np.uint8)
        pixels[2:6, 6:10] = 255
        (tmp_path / "one").mkdir()
        pillow.fromarray(pixels).save(tmp_path / "one" / "1.png")
        middle = ImageFolder(str(tmp_path), size=4, resize=8, **PLAIN)[0][0]
        assert middle.min() == 1.0  # the shorter side of 8 stays 8, and its middle 4 are the white square
        whole = ImageFolder(str(tmp_path), size=8, resize=8, **PLAIN)[0][0]
        assert np.array_equal(whole, pixels.transpose(2, 0, 1)[:, :, 4:12] / np.float32(255))

    def test_each_colour_has_its_mean_and_deviation(self, folder):
        image, _ = ImageFolder(str(folder), size=2, mean=[0.5, 0.25, 0], std=[0.5, 0.25, 2])[0]
        assert image[:, 0, 0].tolist() == [-1, -1, 0.5]

    def test_augmentation_follows_seed_epoch_and_index(self, folder):
        pillow = pytest.importorskip("PIL.Image")
        random = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        pillow.fromarray(random).save(folder / "ant" / "1.png")
        data = ImageFolder(str(folder), size=4, augment=True)
        draws = [Samples(data, 1).read(epoch, 0)[0] for epoch in (0, 0, 1, 2, 3)]
        assert np.array_equal(draws[0], draws[1])
        assert len({draw.tobytes() for draw in draws}) == 4
        assert all(draw.shape == (3, 4, 4) and draw.flags.c_contiguous for draw in draws)

    def test_a_random_part_lies_inside(self):
        np.random.seed(0)
        for width, height in ((1, 1), (3, 100), (640, 480)):
            boxes = [random_box(width, height) for _ in range(200)]
            assert all(0 <= left < right <= width and 0 <= top < bottom <= height for left, top, right, bottom in boxes)
        shares = [(right - left) * (bottom - top) / 640 / 480 for left, top, right, bottom in boxes]
        ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
        assert 0.07 < min(shares) < 0.2 < 0.8 < max(shares) <= 1
        assert 0.74 < min(ratios) < 0.85 < 1.2 < max(ratios) < 1.35
        assert middle_box(640, 480, 0.5) == (200, 120, 440, 360)

    def test_parts_are_apart(self, folder):
        parts = [ImageFolder(str(folder), size=4, split=split, holdout=0.4)._files for split in ("train", "validation")]
        assert [len(part) for part in parts] == [4, 2]
        assert sorted(parts[0] + parts[1]) == ImageFolder(str(folder), size=4)._files

    def test_labels_are_those_of_the_training_folder(self, folder, tmp_path):
        other = tmp_path / "other"
        picture(other / "cat" / "1.png")
        assert ImageFolder(str(other), size=4)[0][1] == 0
        of_folder = {"classes_folder": str(folder)}
        # `other` lies in the folder and so is a class of it here, as any sub-folder is
        assert ImageFolder(str(other), size=4, **of_folder)[0][1] == ["ant", "cat", "other"].index("cat")
        picture(other / "dog" / "1.png")
        with pytest.raises(DataError, match=r"other/dog is no class: those are ant, cat"):
            ImageFolder(str(other), size=4, **of_folder)

    def test_what_cannot_be_read_is_named(self, folder, tmp_path):
        def refuse(message, path, **arguments):
            with pytest.raises(DataError, match=message):
                ImageFolder(str(path), **arguments)

        refuse("nowhere isn't there", tmp_path / "nowhere")
        refuse("list.txt isn't a folder", folder / "list.txt")
        refuse("cat has no sub-folder", folder / "cat")
        (tmp_path / "empty" / "class").mkdir(parents=True)
        refuse(r"empty holds no image .\.jpeg, \.jpg, \.png", tmp_path / "empty")
        refuse("size=8, resize=4", folder, size=8, resize=4)
        refuse("mean=.1.: must be three", folder, mean=[1])
        refuse("std=.0, 1, 1.: must be above 0", folder, std=[0, 1, 1])
        (folder / "ant" / "1.png").write_bytes(b"no image")
        whole = (folder / "cat" / "3.JPEG").read_bytes()
        (folder / "cat" / "3.JPEG").write_bytes(whole[: len(whole) // 2])
        data = ImageFolder(str(folder), size=4)
        for index, name in ((0, "ant/1.png"), (5, "cat/3.JPEG")):
            with pytest.raises(DataError, match=f"{name} can't be read as an image"):
                data[index]


def test_both_parts_of_the_configuration_follow_one_set_of_numbers():
    conf = OmegaConf.create({"data": OmegaConf.load(Path(__file__).parents[2] / "conf/data/image_folder.yaml")})
    conf.data.train.update({"path": "folder", "size": 32, "resize": 40})
    train, validation = (OmegaConf.to_container(conf.data[part], resolve=True) for part in ("train", "validation"))
    assert (train.pop("split"), validation.pop("split")) == ("train", "validation")
    assert train.pop("augment")
    assert validation.pop("classes_folder") == "folder"
    assert train == validation
    assert tuple(train["mean"]) == image_folder.IMAGENET_MEAN
    assert tuple(train["std"]) == image_folder.IMAGENET_STD
