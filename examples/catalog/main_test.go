package main

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/examples/internal/demo/demotest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A plan that is raised in the database holds without a deployment, and ends by itself.
func TestRun(t *testing.T) {
	demotest.Long(t)
	demotest.Run(t, run, 3,
		"INSERT INTO rate_limit_definitions",
		"holds within 5 seconds",
		"ends by itself",
		"initech has what it had")
}

func TestPicture(t *testing.T) {
	svg := picture(map[string][]int{"acme": {10, 10, 50}, "initech": {10}}, time.Second)
	d := xml.NewDecoder(strings.NewReader(svg))
	lines := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "polyline" {
			lines++
		}
	}
	if lines != 2 {
		t.Errorf("got %d lines, want one for each customer", lines)
	}
}
