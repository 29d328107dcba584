"""The registry of datasets, and the metadata of the library's own.

The numbers of nodes, edges and features are those of the graph that `read` returns: undirected,
without self-loops and repeated edges. They were counted in the files, except for wikics,
ogbn-arxiv, arxiv-year, roman-empire, amazon-ratings, questions, flickr, credit, ieee-fraud, penn94,
genius, chameleon-filtered and squirrel-filtered, where they follow from the published statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from typing import TypeVar, get_args

from polyphily.graphs.datasets.info import DatasetInfo, Kind, Part, Reader, common_options
from polyphily.registry import Registry

GEOM_GCN_SPLITS = 10
DATASETS: Registry[DatasetInfo] = Registry("dataset", "datasets", dashes=True)
R = TypeVar("R", bound=Reader)


def register_dataset(info: DatasetInfo) -> Callable[[R], R]:
    """Make a dataset available by name, in `polyphily.load` and on the command line.

    The decorated function gets a `Request`, whose `root` is the data folder and whose `options` are
    the user's. It returns one `Graph` to be partitioned, one graph per client, or a `Collection`:

        @register_dataset(
            DatasetInfo("trade", "Trade", "heterophilic", 180, 900, 12, 4, options={"year": "…"})
        )
        def read_trade(request):
            file = request.root / "trade" / f"{request.options.get('year', '2020')}.npz"
            ...
            return Graph.build(features, edges, labels)

    Other packages name the module with such a function as an entry point in the group
    `polyphily.datasets`.

    Args:
        info: the metadata. If it names files in `parts`, these are looked for under the root, and
            downloaded if possible, before the function is called.

    Raises:
        ValueError: for a kind that does not exist, or a name that is taken.
    """
    if info.kind not in get_args(Kind):
        raise ValueError(
            f"dataset '{info.name}': kind '{info.kind}' is none of {', '.join(get_args(Kind))}"
        )

    def add(reader: R) -> R:
        key, options = DATASETS.key(info.name), common_options(**info.options)
        DATASETS.add(key, replace(info, name=key, options=options, reader=reader))
        return reader

    return add


def _checksums() -> dict[str, str]:
    """Return the sha256 of published files that do not change, by path."""
    text = resources.files(__package__).joinpath("checksums.txt").read_text(encoding="ascii")
    pairs = (line.split("  ", 1) for line in text.splitlines())
    return {path: digest for digest, path in pairs}


CHECKSUMS = _checksums()


def _splits(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_split_0.6_0.2_{i}.npz" for i in range(GEOM_GCN_SPLITS))


def _part(folder: str, files: tuple[str, ...], getter: str, **arguments: str | bool) -> Part:
    """Return a part whose raw files lie where the torch_geometric class puts them."""
    raw = "/".join(filter(None, (getter, folder, "raw")))
    paths = tuple(f"{raw}/{file}" for file in files)
    known = {path: CHECKSUMS[path] for path in paths if path in CHECKSUMS}
    return Part(paths, getter, arguments, known)


def _planetoid(name: str) -> dict[str, Part]:
    low = name.lower()
    ends = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    files = tuple(f"ind.{low}.{end}" for end in ends)
    geom_gcn = "geom-gcn"
    return {
        "public": _part(name, files, "Planetoid", name=name),
        geom_gcn: _part(
            f"{name}/{geom_gcn}", files + _splits(low), "Planetoid", name=name, split=geom_gcn
        ),
    }


def _geom_gcn(getter: str, name: str = "", folder: str = "", splits: str = "") -> dict[str, Part]:
    files = ("out1_node_feature_label.txt", "out1_graph_edges.txt", *_splits(splits or name))
    arguments = {"name": name} if name else {}
    return {"": _part(folder or name, files, getter, **arguments)}


_YANG = (
    "Yang, Cohen, Salakhutdinov: Revisiting Semi-Supervised Learning with Graph Embeddings, 2016"
)
_SHCHUR = "Shchur, Mumme, Bojchevski, Günnemann: Pitfalls of Graph Neural Network Evaluation, 2018"
_PEI = "Pei, Wei, Chang, Lei, Yang: Geom-GCN: Geometric Graph Convolutional Networks, 2020"
_PLATONOV = (
    "Platonov, Kuznedelev, Diskin, Babenko, Prokhorenkova: A Critical Look at the Evaluation of "
    "GNNs under Heterophily, 2023"
)
_ROZEMBERCZKI = "Rozemberczki, Allen, Sarkar: Multi-scale Attributed Node Embedding, 2021"
_HU = "Hu, Fey, Zitnik, et al.: Open Graph Benchmark, 2020"
_GEOM_GCN_SOURCE = "https://github.com/graphdml-uiuc-jlu/geom-gcn (folders new_data and splits)"

_Statistics = tuple[int, int, int, int]  # nodes, edges, features, classes


def _citation_graph(
    name: str, title: str, statistics: _Statistics, class_names: tuple[str, ...], note: str = ""
) -> DatasetInfo:
    return DatasetInfo(
        name,
        title,
        "homophilic",
        *statistics,
        citation=_YANG,
        source="https://github.com/kimiyoung/planetoid/tree/master/data (the splits of geom-gcn: "
        "https://github.com/graphdml-uiuc-jlu/geom-gcn/tree/master/splits)",
        format="planetoid",
        parts=_planetoid(title),
        options=common_options(
            split="which splits of the dataset to load: 'public' (default; one, with 20 training "
            "nodes a class) or 'geom-gcn' (ten)"
        ),
        choice="split",
        default="public",
        class_names=class_names,
        notes=(note,) if note else (),
    )


def _bag_of_words_npz(
    name: str, title: str, statistics: _Statistics, getter: str, folder: str, file: str
) -> DatasetInfo:
    return DatasetInfo(
        name,
        title,
        "homophilic",
        *statistics,
        citation=_SHCHUR,
        source="https://github.com/shchur/gnn-benchmark/tree/master/data/npz",
        format="npz",
        parts={"": _part(folder, (file,), getter, name=folder)},
    )


def _web_pages(
    name: str,
    statistics: _Statistics,
    getter: str,
    folder: str = "",
    clients: int = 10,
    citation: str = _PEI,
    notes: tuple[str, ...] = (),
    **options: str,
) -> DatasetInfo:
    return DatasetInfo(
        name,
        name.capitalize(),
        "heterophilic",
        *statistics,
        citation=citation,
        source=_GEOM_GCN_SOURCE,
        format="geom-gcn",
        parts=_geom_gcn(getter, name, folder),
        default_clients=clients,
        options=common_options(**options),
        notes=notes,
    )


def _yandex(
    name: str,
    title: str,
    statistics: _Statistics,
    metric: str = "accuracy",
    class_names: tuple[str, ...] = (),
) -> DatasetInfo:
    low = name.replace("-", "_")
    return DatasetInfo(
        name,
        title,
        "heterophilic",
        *statistics,
        citation=_PLATONOV,
        source="https://github.com/yandex-research/heterophilous-graphs/tree/main/data",
        format="heterophilous",
        parts={"": _part(low, (f"{low}.npz",), "HeterophilousGraphDataset", name=title)},
        metric=metric,
        class_names=class_names,
    )


_ARXIV_FILES = (
    *(f"raw/{name}.csv.gz" for name in ("edge", "node-feat", "node-label", "node_year")),
    *(f"split/time/{name}.csv.gz" for name in ("train", "valid", "test")),
    "mapping/labelidx2arxivcategeory.csv.gz",  # sic
)


def _arxiv(
    name: str, title: str, kind: Kind, classes: int, clients: int, citation: str, note: str
) -> DatasetInfo:
    return DatasetInfo(
        name,
        title,
        kind,
        *(169_343, 1_157_799, 128),
        classes=classes,
        citation=citation,
        source="https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip",
        format=name,
        parts={"": Part(tuple(f"ogbn_arxiv/{file}" for file in _ARXIV_FILES), "ogb")},
        default_clients=clients,
        extra="ogb",
        notes=(note,),
    )


_DUPLICATES = (
    "many nodes have the same neighbours and label as another one, so that test nodes have twins "
    "in training (Platonov et al. 2023); the option twins=one keeps one of each"
)
_TWINS = "'one' keeps the first of all nodes that have the same neighbours"
_SAME_PAGES = (
    "in the published files Cornell and Texas have identical features and labels; only their "
    "edges and splits differ"
)
_LIM = (
    "Lim, Hohne, Li, et al.: Large Scale Learning on Non-Homophilous Graphs: New Benchmarks and "
    "Strong Simple Methods, 2021"
)
_LINKX_SOURCE = "https://github.com/CUAI/Non-Homophily-Large-Scale/tree/master/data"
_UNIVERSITIES: dict[str, tuple[str, _Statistics, str]] = {  # title, statistics, sha256 of the file
    "reed98": (
        "Reed",
        (962, 18_812, 745, 2),
        "d12ec74dc8c6e237385975b976c3709555a83629a1260be693fb688e3446070e",
    ),
    "amherst41": (
        "Amherst",
        (2_235, 90_954, 1_193, 2),
        "3108e4b2edb01be05c5a61147583a40e61012820fff7eebe621dd26018caaf00",
    ),
    "johnshopkins55": (
        "Johns Hopkins",
        (5_180, 186_586, 2_406, 2),
        "fc7243bf257155df03afbc397ab34b5f8eb8e75f40cd1603398e207a033ef50f",
    ),
    "cornell5": (
        "Cornell University",
        (18_660, 790_777, 4_735, 2),
        "d9ff76ae34e855cb77b0779a3a320f7f73f848901cb13352e2734c17804c4aec",
    ),
    "penn94": ("University of Pennsylvania", (41_554, 1_362_229, 4_814, 2), ""),
}


def _university_files(*names: str) -> Part:
    """Return the files of universities, where the torch_geometric class puts them."""
    files = {name: f"LINKXDataset/{name}/raw/data.mat" for name in names}
    known = {files[name]: _UNIVERSITIES[name][2] for name in names if _UNIVERSITIES[name][2]}
    return Part(tuple(files.values()), "linkx", sha256=known)


def _university(name: str) -> DatasetInfo:
    title, statistics, _ = _UNIVERSITIES[name]
    return DatasetInfo(
        name,
        f"Facebook100, {title}",
        "heterophilic",
        *statistics,
        citation=_LIM,
        source=_LINKX_SOURCE,
        format="facebook100",
        parts={"": _university_files(name)},
        class_names=("1", "2"),
    )


def _filtered(name: str, title: str, statistics: _Statistics) -> DatasetInfo:
    """Return a Wikipedia graph without twins, as Platonov et al. filtered it."""
    file = f"{name.replace('-', '_')}.npz"
    base = "https://raw.githubusercontent.com/yandex-research/heterophilous-graphs"
    commit = "a431395582e929d88271309716bea4fe24ce6318"
    return DatasetInfo(
        name,
        title,
        "heterophilic",
        *statistics,
        citation=_PLATONOV,
        source="https://github.com/yandex-research/heterophilous-graphs/tree/main/data",
        format="heterophilous",
        parts={
            "": Part((f"filtered/{file}",), "https", {"url": f"{base}/{commit}/data/{file}"}),
        },
    )


_COUNTRIES = ("DE", "EN", "ES", "FR", "PT", "RU")
_LEVELS = tuple(i / 10 for i in range(11))

_ALL = (
    _citation_graph(
        "cora",
        "Cora",
        (2_708, 5_278, 1_433, 7),
        (
            "theory",
            "reinforcement learning",
            "genetic algorithms",
            "neural networks",
            "probabilistic methods",
            "case based",
            "rule learning",
        ),
    ),
    _citation_graph(
        "citeseer",
        "CiteSeer",
        (3_327, 4_552, 3_703, 6),
        ("AI", "ML", "IR", "DB", "agents", "HCI"),
        "15 documents have neither features nor a label; as is usual, they are given class 0",
    ),
    _citation_graph(
        "pubmed",
        "PubMed",
        (19_717, 44_324, 500, 3),
        ("diabetes, experimental", "diabetes type 1", "diabetes type 2"),
    ),
    _bag_of_words_npz(
        "coauthor-cs",
        "Coauthor CS",
        (18_333, 81_894, 6_805, 15),
        *("Coauthor", "CS", "ms_academic_cs.npz"),
    ),
    _bag_of_words_npz(
        "coauthor-physics",
        "Coauthor Physics",
        (34_493, 247_962, 8_415, 5),
        *("Coauthor", "Physics", "ms_academic_phy.npz"),
    ),
    _bag_of_words_npz(
        "amazon-photo",
        "Amazon Photo",
        (7_650, 119_081, 745, 8),
        *("Amazon", "Photo", "amazon_electronics_photo.npz"),
    ),
    _bag_of_words_npz(
        "amazon-computers",
        "Amazon Computers",
        (13_752, 245_861, 767, 10),
        *("Amazon", "Computers", "amazon_electronics_computers.npz"),
    ),
    DatasetInfo(
        "wikics",
        "WikiCS",
        "homophilic",
        *(11_701, 215_603, 300, 10),
        citation="Mernyei, Cangea: Wiki-CS: A Wikipedia-Based Benchmark for GNNs, 2020",
        source="https://github.com/pmernyei/wiki-cs-dataset/tree/master/dataset",
        format="wikics",
        parts={"": _part("", ("data.json",), "WikiCS", is_undirected=True)},
    ),
    _arxiv(
        *("ogbn-arxiv", "ogbn-arxiv", "homophilic", 40, 10, _HU),
        note="citations are read as undirected edges",
    ),
    _arxiv(
        *("arxiv-year", "arXiv-year", "heterophilic", 5, 30),
        citation="Lim, Hohne, Li, et al.: Large Scale Learning on Non-Homophilous Graphs, 2021",
        note="the classes are fifths of the publication year; citations are read as undirected",
    ),
    _yandex("roman-empire", "Roman-empire", (22_662, 32_927, 300, 18)),
    _yandex("amazon-ratings", "Amazon-ratings", (24_492, 93_050, 300, 5)),
    _yandex("minesweeper", "Minesweeper", (10_000, 39_402, 7, 2), "auc", ("clear", "mine")),
    _yandex("tolokers", "Tolokers", (11_758, 519_000, 10, 2), "auc", ("active", "banned")),
    _yandex("questions", "Questions", (48_921, 153_540, 301, 2), "auc"),
    _web_pages("cornell", (183, 277, 1_703, 5), "WebKB", clients=5, notes=(_SAME_PAGES,)),
    _web_pages("texas", (183, 279, 1_703, 5), "WebKB", clients=5, notes=(_SAME_PAGES,)),
    _web_pages("wisconsin", (251, 450, 1_703, 5), "WebKB", clients=5),
    DatasetInfo(
        "actor",
        "Actor",
        "heterophilic",
        *(7_600, 26_659, 932, 5),
        citation=_PEI,
        source=_GEOM_GCN_SOURCE,
        format="actor",
        parts=_geom_gcn("Actor", splits="film"),
    ),
    _web_pages(
        "chameleon",
        (2_277, 31_371, 2_325, 5),
        "WikipediaNetwork",
        "chameleon/geom_gcn",
        citation=_ROZEMBERCZKI,
        notes=(_DUPLICATES,),
        twins=_TWINS,
    ),
    _web_pages(
        "squirrel",
        (5_201, 198_353, 2_089, 5),
        "WikipediaNetwork",
        "squirrel/geom_gcn",
        citation=_ROZEMBERCZKI,
        notes=(_DUPLICATES,),
        twins=_TWINS,
    ),
    DatasetInfo(
        "flickr",
        "Flickr",
        "heterophilic",
        *(89_250, 449_878, 500, 7),
        citation="Zeng, Zhou, Srivastava, Kannan, Prasanna: GraphSAINT, 2020",
        source="https://github.com/GraphSAINT/GraphSAINT (section Datasets, folder flickr)",
        format="flickr",
        parts={
            "": _part("", ("adj_full.npz", "feats.npy", "class_map.json", "role.json"), "Flickr")
        },
    ),
    DatasetInfo(
        "syn-cora",
        "syn-cora",
        "synthetic",
        *(1_490, 2_968, 1_433, 5),
        citation="Zhu, Yan, Zhao, Heimann, Akoglu, Koutra: Beyond Homophily in GNNs (H2GCN), 2020",
        source="https://github.com/GemsLab/H2GCN (data set syn-cora, replicate 1 of each level)",
        format="syn-cora",
        parts={str(level): Part((f"syn-cora/h{level:.2f}-r1.npz",)) for level in _LEVELS},
        options=common_options(
            homophily="share of edges inside a class: 0.0, 0.1, … 1.0 (default 0.5), or 'all' for "
            "a natural federation with one client per level"
        ),
        choice="homophily",
        default="0.5",
        combines=True,
        short="homophily",
    ),
    DatasetInfo(
        "twitch",
        "Twitch",
        "heterophilic",
        *(34_118, 429_113, 3_170, 2),
        citation=_ROZEMBERCZKI,
        source="https://graphmining.ai/datasets/ptg/twitch (128 reduced features), or "
        "https://snap.stanford.edu/data/twitch-social-networks.html (3,170 games)",
        format="twitch",
        parts={
            country.lower(): _part(country, (f"{country}.npz",), "Twitch", name=country)
            for country in _COUNTRIES
        },
        natural=True,
        default_clients=len(_COUNTRIES),
        class_names=("general", "mature"),
    ),
    DatasetInfo(
        "credit",
        "Credit",
        "fraud",
        *(30_000, 1_436_858, 13, 2),
        citation="Yeh, Lien: The comparisons of data mining techniques for the predictive accuracy "
        "of probability of default of credit card clients, 2009; graph: Agarwal, Lakkaraju, "
        "Zitnik: Towards a Unified Framework for Fair and Stable GRL (NIFTY), 2021",
        source="https://github.com/chirag126/nifty (dataset/credit: credit.csv and "
        "credit_edges.txt), or the UCI repository's 'default of credit card clients' saved as "
        "CSV under the name credit.csv",
        format="credit",
        parts={"": Part(("credit/credit.csv",))},
        natural=True,
        metric="auc",
        default_clients=4,
        options=common_options(
            neighbours="link everybody to this many of the most similar people in place of the "
            "published edges (default without credit_edges.txt: 20)"
        ),
        class_names=("pays", "defaults"),
        notes=("edges between people of different education, that is of two clients, are cut",),
    ),
    DatasetInfo(
        "ieee-fraud",
        "IEEE-CIS fraud",
        "fraud",
        *(144_233, 1_442_110, 371, 2),
        citation="Howard, Bouchon-Meunier, IEEE CIS, et al.: IEEE-CIS Fraud Detection, 2019",
        source="https://www.kaggle.com/competitions/ieee-fraud-detection/data",
        format="ieee-fraud",
        parts={
            "": Part(("ieee-fraud/train_transaction.csv", "ieee-fraud/train_identity.csv")),
        },
        natural=True,
        metric="auc",
        default_clients=4,
        options=common_options(
            link="'time' (default) links transactions that follow one another, 'card' only those "
            "among them that share card, address and device",
            reach="how many of the following transactions each one is linked to (default 10)",
        ),
        class_names=("genuine", "fraud"),
    ),
    *(_university(name) for name in _UNIVERSITIES),
    DatasetInfo(
        "facebook100",
        "Facebook100",
        "heterophilic",
        *(27_037, 1_087_129, 6_059, 2),
        citation=_LIM,
        source=_LINKX_SOURCE,
        format="facebook100",
        parts={
            "four": _university_files(*[name for name in _UNIVERSITIES if name != "penn94"]),
            "five": _university_files(*_UNIVERSITIES),
        },
        natural=True,
        default_clients=4,
        options=common_options(
            universities="'four' (default): Reed, Amherst, Johns Hopkins, Cornell; 'five' adds "
            "Pennsylvania"
        ),
        choice="universities",
        default="four",
        class_names=("1", "2"),
    ),
    DatasetInfo(
        "genius",
        "Genius",
        "heterophilic",
        *(421_961, 984_979, 12, 2),
        citation=_LIM,
        source=_LINKX_SOURCE,
        format="genius",
        parts={"": Part(("LINKXDataset/genius/raw/data.mat",), "linkx")},
        metric="auc",
    ),
    _filtered("chameleon-filtered", "Chameleon, filtered", (890, 8_854, 2_325, 5)),
    _filtered("squirrel-filtered", "Squirrel, filtered", (2_223, 46_998, 2_089, 5)),
    DatasetInfo(
        "csbm",
        "Contextual stochastic block model",
        "synthetic",
        *(30_000, 75_000, 100, 2),
        citation="Deshpande, Sen, Montanari, Mossel: Contextual Stochastic Block Models, 2018",
        source="drawn from the seed; nothing to download",
        format="csbm",
        parts={},
        natural=True,
        options=common_options(
            nodes="nodes of a client: a number, or a range to draw from (default 1000-5000)",
            features="number of features (default 100)",
            mu="strength of the features (default 10)",
            degree="average degree (default 5)",
            homophily="the middle of the clients' homophily (default 0.5)",
            gap="the width of the interval that the homophily lies in (default 0.8)",
            spread="'uniform' (default) draws each client's homophily from the interval, 'even' "
            "spaces the clients over it",
            positives="share of nodes of the second class (default 0.5)",
        ),
        class_names=("-1", "+1"),
        notes=("the statistics are those expected of ten clients with the default options",),
    ),
    DatasetInfo(
        "payments",
        "Synthetic payments, some illicit",
        "synthetic",
        *(25_000, 36_500, 20, 2),
        citation="in the manner of Weber et al.: Anti-Money Laundering in Bitcoin, 2019",
        source="drawn from the seed; nothing to download",
        format="payments",
        parts={},
        natural=True,
        default_clients=5,
        options=common_options(
            nodes="payments of a bank (default 5000)",
            features="number of features (default 20)",
            positives="share of illicit payments (default 0.02)",
            unknown="share of payments without a label (default 0.5)",
            strength="distance of illicit from other payments, in deviations (default 0.5)",
            steps="number of time steps; edges stay within one (default 10)",
        ),
        class_names=("licit", "illicit"),
        notes=("the statistics are those expected of five clients with the default options",),
    ),
)

for _info in _ALL:
    DATASETS.add(_info.name, _info)
