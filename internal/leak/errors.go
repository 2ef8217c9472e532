package leak

import (
	"errors"
	"fmt"
	"go/ast"
	"go/token"
	"reflect"
	"strings"
	"testing"
)

// Provoked is an error that a call with Key returned, which must be Is, unless that is nil for
// an error that is a type.
type Provoked struct{ Is, Err error }

// Errors looks for Key in the text of every error that the package in the directory exports:
// the variables Err…, and the types …Error. One that is missing in provoked is an error, and so
// is a name that is none, and an error that is not what it is there for.
func Errors(t *testing.T, dir string, provoked map[string]Provoked) {
	t.Helper()
	names := exportedErrors(t, dir)
	for name := range names {
		if _, ok := provoked[name]; !ok {
			t.Errorf("error %s is not provoked here, by a call with leak.Key", name)
		}
	}
	for name, p := range provoked {
		switch {
		case !names[name]:
			t.Errorf("there is no exported error %s", name)
		case p.Is != nil && !errors.Is(p.Err, p.Is), p.Is == nil && !hasType(p.Err, name):
			t.Errorf("got %v, want %s", p.Err, name)
		case shows(fmt.Sprint(p.Err), Key):
			t.Errorf("%s shows the key: %v", name, p.Err)
		}
	}
}

// hasType reports whether one of the errors that err wraps has a type of this name.
func hasType(err error, name string) bool {
	if err == nil {
		return false
	}
	of := reflect.TypeOf(err)
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Name() == name {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return hasType(e.Unwrap(), name)
	case interface{ Unwrap() []error }:
		for _, one := range e.Unwrap() {
			if hasType(one, name) {
				return true
			}
		}
	}
	return false
}

// exportedErrors returns the names of the errors that the package exports.
func exportedErrors(t *testing.T, dir string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for spec, tok := range declared(t, dir) {
		switch s := spec.(type) {
		case *ast.ValueSpec:
			for _, n := range s.Names {
				if tok == token.VAR && strings.HasPrefix(n.Name, "Err") {
					names[n.Name] = true
				}
			}
		case *ast.TypeSpec:
			if s.Name.IsExported() && strings.HasSuffix(s.Name.Name, "Error") {
				names[s.Name.Name] = true
			}
		}
	}
	return names
}
