// The Python face of the kernels: functions that take addresses, sizes and strides as integers.
//
// Callers (see __init__.py) have checked shapes, dtypes and strides. Integers rather than tensors, because reading an
// integer takes 10 ns and this file then needs neither torch's headers nor the minute it takes to compile them. The
// interpreter lock is released while a kernel runs.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace {

// Reads arguments one after another; after the last, `done` says whether all were there and were numbers.
class Arguments {
  public:
    Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), count_(count) {}

    int64_t integer() { return next_ < count_ ? PyLong_AsLongLong(values_[next_++]) : (next_++, 0); }
    float real() { return next_ < count_ ? static_cast<float>(PyFloat_AsDouble(values_[next_++])) : (next_++, 0.0f); }
    template <class T>
    T* address() {
        return reinterpret_cast<T*>(static_cast<intptr_t>(integer()));
    }

    bool done() const {
        if (PyErr_Occurred()) return false;
        if (next_ == count_) return true;
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", next_, count_);
        return false;
    }

    Heads heads() {
        Heads view;
        view.data = address<bf16>();
        view.row_stride = integer();
        view.head_stride = integer();
        return view;
    }

    Pages pages() {
        Pages view;
        view.data = address<bf16>();
        view.page_stride = integer();
        view.token_stride = integer();
        view.head_stride = integer();
        return view;
    }

    PackedWeight weight() {
        PackedWeight weight;
        weight.data = address<void>();
        weight.scale = address<void>();
        weight.minimum = address<void>();
        weight.rows = integer();
        weight.columns = integer();
        weight.bits = static_cast<int>(integer());
        weight.zero = static_cast<int>(integer());
        weight.group = integer();
        weight.wide_scale = integer() != 0;
        return weight;
    }

  private:
    PyObject* const* values_;
    Py_ssize_t count_;
    Py_ssize_t next_ = 0;
};

#define RUN(call)          \
    Py_BEGIN_ALLOW_THREADS \
    call;                  \
    Py_END_ALLOW_THREADS   \
    Py_RETURN_NONE

PyObject* py_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    const PackedWeight weight = in.weight();
    const bf16* x = in.address<bf16>();
    const int64_t x_stride = in.integer(), rows = in.integer();
    Output output;
    output.data = in.address<void>();
    output.stride = in.integer();
    output.wide = in.integer() != 0;
    output.bias = in.address<bf16>();
    if (!in.done()) return nullptr;
    RUN(linear(x, x_stride, rows, weight, output));
}

PyObject* py_embedding(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    const PackedWeight weight = in.weight();
    const int64_t* ids = in.address<int64_t>();
    const int64_t ids_count = in.integer(), start = in.integer();
    bf16* output = in.address<bf16>();
    if (!in.done()) return nullptr;
    RUN(embedding(ids, ids_count, start, weight, output));
}

PyObject* py_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    const Heads x = in.heads(), output = in.heads();
    const bf16* weight = in.address<bf16>();
    const int64_t rows = in.integer(), heads = in.integer(), size = in.integer();
    const float eps = in.real();
    const bool zero_centred = in.integer() != 0;
    if (!in.done()) return nullptr;
    RUN(rms_norm(x, output, weight, rows, heads, size, eps, zero_centred));
}

PyObject* py_add_rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    const bf16* x = in.address<bf16>();
    const int64_t x_stride = in.integer();
    const bf16* residual = in.address<bf16>();
    const int64_t residual_stride = in.integer();
    bf16* sum = in.address<bf16>();
    bf16* output = in.address<bf16>();
    const bf16* weight = in.address<bf16>();
    const int64_t rows = in.integer(), size = in.integer();
    const float eps = in.real();
    const bool zero_centred = in.integer() != 0;
    if (!in.done()) return nullptr;
    RUN(add_rms_norm(x, x_stride, residual, residual_stride, sum, output, weight, rows, size, eps, zero_centred));
}

PyObject* py_silu_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    const bf16* x = in.address<bf16>();
    const int64_t x_stride = in.integer();
    bf16* output = in.address<bf16>();
    const int64_t rows = in.integer(), size = in.integer();
    if (!in.done()) return nullptr;
    RUN(silu_mul(x, x_stride, output, rows, size));
}

PyObject* py_attention_prologue(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    Prologue p;
    p.qkv = in.address<bf16>();
    p.qkv_stride = in.integer();
    p.query = in.address<bf16>();
    p.gate = in.address<bf16>();
    p.query_norm = in.address<bf16>();
    p.key_norm = in.address<bf16>();
    p.angles = in.address<float>();
    p.angle_stride = in.integer();
    p.half = in.integer();
    p.key = in.pages();
    p.value = in.pages();
    p.slot = in.address<int64_t>();
    p.page_size = in.integer();
    p.tokens = in.integer();
    p.heads = in.integer();
    p.key_heads = in.integer();
    p.size = in.integer();
    p.eps = in.real();
    p.zero_centred = in.integer() != 0;
    if (!in.done()) return nullptr;
    RUN(attention_prologue(p));
}

PyObject* py_attend(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Arguments in(values, count);
    Attention a;
    a.query = in.heads();
    a.output = in.heads();
    a.key = in.pages();
    a.value = in.pages();
    a.pages = in.address<int32_t>();
    a.pages_stride = in.integer();
    a.pages_columns = in.integer();
    a.row = in.address<int32_t>();
    a.query_start = in.address<int32_t>();
    a.length = in.address<int32_t>();
    a.requests = in.integer();
    a.query_heads = in.integer();
    a.key_heads = in.integer();
    a.size = in.integer();
    a.page_size = in.integer();
    a.window = in.integer();
    a.causal = in.integer() != 0;
    a.scale = in.real();
    if (!in.done()) return nullptr;
    RUN(attend(a));
}

// The number of OpenMP threads that a kernel called from this thread uses: torch's own setting, if OpenMP is shared.
PyObject* py_threads(PyObject*, PyObject*) { return PyLong_FromLong(omp_get_max_threads()); }

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_##name)), METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    FAST(linear),
    FAST(embedding),
    FAST(rms_norm),
    FAST(add_rms_norm),
    FAST(silu_mul),
    FAST(attention_prologue),
    FAST(attend),
    {"threads", py_threads, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "firstlight_cpu_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_firstlight_cpu_native() { return PyModule_Create(&definition); }
