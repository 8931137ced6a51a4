/* Several launches of CUDA kernels by one call from Python.
 *
 * In: the driver's library (use); of each launch its function, grid, threads, shared memory, attributes and parameters
 * (Launches). Out: an object whose launch(values, stream) makes them in order.
 * A parameter is (bytes, index, number): the number itself where index is -1, a tensor map where bytes are those of
 * one, which is values[index], else the address values[index] + number.
 * Invariants: every parameter has as many bytes as the driver says that the kernel takes; what a Launches holds never
 * changes, so that threads may use it side by side. Python's lock is let go of while the driver launches, which waits
 * where its queue is full.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !PY_LITTLE_ENDIAN
#error "numbers are passed by their first bytes"
#endif

enum { MOST_VALUES = 64, MOST_MAPS = 16, MOST_PARAMETERS = 64 };

typedef struct {
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*parameter)(CUfunction, size_t, size_t *, size_t *);
    CUresult (*current)(CUcontext *);
    CUresult (*make_current)(CUcontext);
    CUresult (*describe)(CUresult, const char **);
} Driver;

static Driver driver; /* as `use` found it */

typedef struct {
    int bytes, index;
    int64_t number;
} Parameter;

typedef struct {
    CUfunction function;
    CUlaunchConfig config; /* but for the stream */
    CUlaunchAttribute attributes[2];
    Py_ssize_t parameters;
    Parameter parameter[MOST_PARAMETERS];
} Launch;

typedef struct {
    PyObject_HEAD
    CUcontext context;      /* of the functions, made current where a thread has none */
    PyTypeObject *map_type; /* an object of it ends in a CUtensorMap */
    Py_ssize_t values, launches;
    enum { UNUSED, ADDRESS, MAP } kind[MOST_VALUES];
    Launch *launch;
} Launches;

static PyObject *failed(CUresult result, const char *what, Py_ssize_t which)
{
    const char *why = NULL;
    if (driver.describe(result, &why) != CUDA_SUCCESS || !why)
        why = "unknown error";
    return PyErr_Format(PyExc_RuntimeError, "%s %zd: %s (CUDA error %d)", what, which, why, (int)result);
}

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *path)
{
    const char *name = PyUnicode_AsUTF8(path);
    if (!name)
        return NULL;
    void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL); /* for as long as the process runs */
    if (!library)
        return PyErr_Format(PyExc_OSError, "%s", dlerror());
    static const struct {
        size_t at;
        const char *name;
    } wanted[] = {
        {offsetof(Driver, launch), "cuLaunchKernelEx"},
        {offsetof(Driver, parameter), "cuFuncGetParamInfo"}, /* CUDA 12.4 */
        {offsetof(Driver, current), "cuCtxGetCurrent"},
        {offsetof(Driver, make_current), "cuCtxSetCurrent"},
        {offsetof(Driver, describe), "cuGetErrorString"},
    };
    Driver found;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = dlsym(library, wanted[i].name);
        if (!function)
            return PyErr_Format(PyExc_OSError, "%s has no %s", name, wanted[i].name);
        memcpy((char *)&found + wanted[i].at, &function, sizeof function);
    }
    driver = found;
    Py_RETURN_NONE;
}

/* Whether a number is one of so many bytes, with a sign or without. */
static int fits(int64_t number, int bytes)
{
    if (bytes != 1 && bytes != 2 && bytes != 4)
        return bytes == 8;
    int64_t half = (int64_t)1 << (8 * bytes - 1);
    return -half <= number && number < 2 * half;
}

/* 0, or -1 with an exception. */
static int read_parameter(Launches *self, CUfunction function, Py_ssize_t at, PyObject *given, Parameter *p)
{
    long long number;
    size_t offset, bytes;
    if (!PyTuple_Check(given)) {
        PyErr_Format(PyExc_TypeError, "%R is no parameter", given);
        return -1;
    }
    if (!PyArg_ParseTuple(given, "iiL:parameter", &p->bytes, &p->index, &number))
        return -1;
    p->number = number;
    CUresult result = driver.parameter(function, (size_t)at, &offset, &bytes);
    if (result != CUDA_SUCCESS) {
        failed(result, "parameter", at);
        return -1;
    }
    int known = p->bytes >= 0 && bytes == (size_t)p->bytes && p->index >= -1 && p->index < self->values;
    if (known && p->index >= 0) {
        int kind = bytes == sizeof(CUtensorMap) ? MAP : bytes == sizeof(CUdeviceptr) ? ADDRESS : UNUSED;
        known = kind != UNUSED && (self->kind[p->index] == UNUSED || (int)self->kind[p->index] == kind);
        if (known)
            self->kind[p->index] = kind;
    } else if (known)
        known = fits(number, p->bytes);
    if (!known)
        PyErr_Format(PyExc_ValueError, "parameter %zd takes %zu bytes, given (%d, %d, %lld) of %zd values", at, bytes,
                     p->bytes, p->index, number, self->values);
    return known ? 0 : -1;
}

static int read_launch(Launches *self, PyObject *given, Launch *launch)
{
    unsigned long long function;
    unsigned int x, y, z, threads, shared;
    int early, cooperative;
    PyObject *parameters;
    if (!PyTuple_Check(given)) {
        PyErr_Format(PyExc_TypeError, "%R is no launch", given);
        return -1;
    }
    if (!PyArg_ParseTuple(given, "K(III)IIppO!:launch", &function, &x, &y, &z, &threads, &shared, &early, &cooperative,
                          &PyTuple_Type, &parameters))
        return -1;
    launch->function = (CUfunction)(uintptr_t)function;
    launch->parameters = PyTuple_GET_SIZE(parameters);
    if (!function || !x || !y || !z || !threads || launch->parameters > MOST_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "function %llu, grid (%u, %u, %u), %u threads, %zd parameters", function, x, y,
                     z, threads, launch->parameters);
        return -1;
    }
    for (Py_ssize_t i = 0; i < launch->parameters; i++)
        if (read_parameter(self, launch->function, i, PyTuple_GET_ITEM(parameters, i), &launch->parameter[i]) < 0)
            return -1;
    size_t offset, bytes;
    if (driver.parameter(launch->function, (size_t)launch->parameters, &offset, &bytes) != CUDA_ERROR_INVALID_VALUE) {
        PyErr_Format(PyExc_ValueError, "the kernel takes more than %zd parameters", launch->parameters);
        return -1;
    }
    CUlaunchAttribute *attribute = launch->attributes;
    if (early) { /* programmatic dependent launch */
        attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute++->value.programmaticStreamSerializationAllowed = 1;
    }
    if (cooperative) {
        attribute->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attribute++->value.cooperative = 1;
    }
    launch->config = (CUlaunchConfig){
        .gridDimX = x, .gridDimY = y, .gridDimZ = z,
        .blockDimX = threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = shared,
        .attrs = launch->attributes, .numAttrs = (unsigned int)(attribute - launch->attributes),
    };
    return 0;
}

/* Launches(values, type of tensor maps or None, ((function, grid, threads, shared, early, cooperative, parameters), ...))
 * ValueError where a launch is not as the kernel takes it. */
static PyObject *new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    Py_ssize_t values;
    PyObject *map_type, *launches;
    if (names && PyDict_GET_SIZE(names))
        return PyErr_Format(PyExc_TypeError, "Launches takes no names");
    if (!PyArg_ParseTuple(arguments, "nOO!:Launches", &values, &map_type, &PyTuple_Type, &launches))
        return NULL;
    if (!driver.launch)
        return PyErr_Format(PyExc_RuntimeError, "no driver: use(path) comes first");
    if (values < 0 || values > MOST_VALUES)
        return PyErr_Format(PyExc_ValueError, "%zd values, of at most %d", values, MOST_VALUES);
    if (map_type != Py_None && !PyType_Check(map_type))
        return PyErr_Format(PyExc_TypeError, "%R is no type of tensor maps", map_type);

    Launches *self = (Launches *)type->tp_alloc(type, 0); /* of zeros */
    if (!self)
        return NULL;
    self->values = values;
    if (map_type != Py_None)
        self->map_type = (PyTypeObject *)Py_NewRef(map_type);
    CUresult result = driver.current(&self->context);
    self->launches = PyTuple_GET_SIZE(launches);
    self->launch = PyMem_Calloc((size_t)self->launches + 1, sizeof(Launch));
    if (result != CUDA_SUCCESS || !self->context)
        PyErr_Format(PyExc_RuntimeError, "no CUDA context is current");
    else if (!self->launch)
        PyErr_NoMemory();
    else {
        for (Py_ssize_t i = 0; i < self->launches && !PyErr_Occurred(); i++)
            read_launch(self, PyTuple_GET_ITEM(launches, i), &self->launch[i]);
        int maps = 0;
        for (Py_ssize_t i = 0; i < values; i++)
            maps += self->kind[i] == MAP;
        size_t end = self->map_type ? (size_t)self->map_type->tp_basicsize : 0;
        if (!PyErr_Occurred() && maps && (maps > MOST_MAPS || end < sizeof(PyObject) + sizeof(CUtensorMap)))
            PyErr_Format(PyExc_ValueError, "%d tensor maps in objects of %zu bytes", maps, end);
    }
    if (!PyErr_Occurred())
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void dealloc(Launches *self)
{
    Py_XDECREF(self->map_type);
    PyMem_Free(self->launch);
    Py_TYPE(self)->tp_free(self);
}

/* Makes one launch. pointers to what each parameter is: the driver copies it. */
static CUresult make(Launch *launch, CUstream stream, const uint64_t *value, CUtensorMap *maps)
{
    uint64_t address[MOST_PARAMETERS];
    void *pointers[MOST_PARAMETERS];
    for (Py_ssize_t i = 0; i < launch->parameters; i++) {
        Parameter *p = &launch->parameter[i];
        if (p->index < 0)
            pointers[i] = &p->number;
        else if (p->bytes == sizeof(CUtensorMap))
            pointers[i] = &maps[value[p->index]];
        else {
            address[i] = value[p->index] + (uint64_t)p->number;
            pointers[i] = &address[i];
        }
    }
    CUlaunchConfig config = launch->config;
    config.hStream = stream;
    return driver.launch(&config, launch->function, pointers, NULL);
}

/* launch(values, stream): values is a list of addresses and, where a parameter says so, tensor maps. */
static PyObject *launch(Launches *self, PyObject *const *arguments, Py_ssize_t number)
{
    uint64_t value[MOST_VALUES]; /* an address, or which of maps */
    CUtensorMap maps[MOST_MAPS]; /* copies, so that nothing is read of Python's objects without its lock */
    uint64_t known = 0;
    if (number != 2 || !PyList_Check(arguments[0]) || PyList_GET_SIZE(arguments[0]) != self->values)
        return PyErr_Format(PyExc_TypeError, "launch takes a list of %zd values, and a stream", self->values);
    for (Py_ssize_t i = 0; i < self->values; i++) {
        PyObject *item = PyList_GET_ITEM(arguments[0], i);
        if (self->kind[i] != MAP) {
            value[i] = PyLong_AsUnsignedLongLong(item);
            if (value[i] == UINT64_MAX && PyErr_Occurred())
                return NULL;
        } else if (Py_IS_TYPE(item, self->map_type)) {
            memcpy(&maps[known], (char *)item + self->map_type->tp_basicsize - sizeof *maps, sizeof *maps);
            value[i] = known++;
        } else
            return PyErr_Format(PyExc_TypeError, "value %zd is no tensor map but %R", i, item);
    }
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    if (!stream && PyErr_Occurred())
        return NULL;

    CUcontext current = NULL;
    Py_ssize_t made = 0;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = driver.current(&current);
    if (result == CUDA_SUCCESS && !current)
        result = driver.make_current(self->context);
    while (result == CUDA_SUCCESS && made < self->launches)
        result = make(&self->launch[made++], stream, value, maps);
    Py_END_ALLOW_THREADS
    if (result != CUDA_SUCCESS)
        return failed(result, "launch", made);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(values, stream)"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moe_compile_launches.Launches",
    .tp_basicsize = sizeof(Launches),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
};

static PyMethodDef functions[] = {
    {"use", use, METH_O, "use(path): of the driver's library, e.g. libcuda.so.1"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "moe_compile_launches",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_moe_compile_launches(void)
{
    PyObject *module = PyType_Ready(&type) < 0 ? NULL : PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "Launches", (PyObject *)&type) < 0)
        Py_CLEAR(module);
    return module;
}
