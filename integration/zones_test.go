package integration

import (
	"archive/zip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// zoneNames returns the names of all time zones that Go's own copy of the database has.
func zoneNames() ([]string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, err
	}
	archive, err := zip.OpenReader(filepath.Join(strings.TrimSpace(string(root)), "lib", "time", "zoneinfo.zip"))
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	var names []string
	for _, f := range archive.File {
		if !strings.HasSuffix(f.Name, "/") && f.Name != "Factory" {
			names = append(names, f.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

const daySeconds = 24 * 60 * 60

// daysOf returns the days that clocks in a location show from one year to another, as days since
// 1970, and the first second of each. It looks at the clock once a day, and where its distance
// from Greenwich has changed, it halves the time until it knows when.
func daysOf(location *time.Location, from, to int) (days []int64, first map[int64]int64) {
	offset := func(second int64) int64 {
		_, o := time.Unix(second, 0).In(location).Zone()
		return int64(o)
	}
	begin := time.Date(from, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	end := time.Date(to, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	first = map[int64]int64{}
	note := func(from, to, offset int64) { // a stretch of one offset
		for d := dayOf(from + offset); d <= dayOf(to-1+offset); d++ {
			if _, known := first[d]; !known {
				first[d] = max(from, d*daySeconds-offset)
				days = append(days, d)
			}
		}
	}
	stretch := begin
	for at := begin; at < end; at += daySeconds {
		before := offset(at)
		if offset(at+daySeconds) == before {
			continue
		}
		low, high := at, at+daySeconds
		for high-low > 1 {
			if middle := low + (high-low)/2; offset(middle) == before {
				low = middle
			} else {
				high = middle
			}
		}
		note(stretch, high, before)
		stretch = high
		if offset(high) != offset(at+daySeconds) { // two changes in a day
			return nil, nil
		}
	}
	note(stretch, end, offset(end-1))
	slices.Sort(days)
	return days[1:], first // the first one had begun
}

func dayOf(second int64) int64 {
	d := second / daySeconds
	if second%daySeconds < 0 {
		d--
	}
	return d
}
